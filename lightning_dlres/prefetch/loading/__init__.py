"""Loading: samples decoded and collated into batches on one rank."""
