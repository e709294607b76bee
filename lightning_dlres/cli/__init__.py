"""The command line: `dlres demo`, and LightningCLI as `dlres fit`, `validate`, `test`, `predict`."""
