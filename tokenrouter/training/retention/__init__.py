"""Training of the learned retention policy: what entries received, what they were needed for, and the fit."""
