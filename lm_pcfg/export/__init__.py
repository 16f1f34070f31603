"""A model to hand on: a folder for the Hugging Face hub and for MLflow, pruned if wanted, with a model card."""
