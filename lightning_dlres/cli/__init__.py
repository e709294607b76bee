"""The command line: `dlres demo`, and LightningCLI as `dlres fit` and the like."""
