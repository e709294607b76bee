"""The call of the pipelined module: the modes around it, and changes made before it.

`training_step` calls the module on some ranks, and the layers run on others. So the layers see no
mode that the step has entered, and no change that it has made until its call.
"""
