"""The worker: pushes gradients to the servers, and receives parameters from them."""
