"""A trained model behind HTTP: `lm_pcfg serve`."""
