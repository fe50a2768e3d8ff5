"""Op families: each has its public functions here, and one module a tier (reference, torch, cpu, triton)."""
