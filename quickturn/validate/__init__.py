"""Checks of one model on one machine, from kernels to speed, in a bundle that others can run again."""
