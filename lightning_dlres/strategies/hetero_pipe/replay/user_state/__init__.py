"""The user's state: attributes, containers and objects that a training step can reach.

`attributes` reads it, isolates a run from it, and finds what the run changed. `attribute_changes`
is the form in which the changes travel. `user_objects` knows the kinds of objects.
"""
