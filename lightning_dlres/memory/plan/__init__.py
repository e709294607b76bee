"""Plan: where saved tensors go, and the policy that follows the plan."""
