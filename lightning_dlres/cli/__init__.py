"""Commands of `dlres`: demo, plan, store, and LightningCLI's fit, validate, test and predict."""
