"""LightningDataModules and what they share."""
