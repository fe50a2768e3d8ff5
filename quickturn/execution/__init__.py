"""Carries out the plans of the control plane on one device."""
