"""Kernels of gradient codecs: one pass over memory to add the residual, quantise, pack and keep the
new residual; one pass to unpack and accumulate."""
