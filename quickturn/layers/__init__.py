"""What models are made of: small callables over the kernels, without a word about hardware or ranks."""
