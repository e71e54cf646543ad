"""LightningModules: how a network is trained and judged."""
