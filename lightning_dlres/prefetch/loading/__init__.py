"""Loading on one rank: samples are requested, decoded and collated into batches."""
