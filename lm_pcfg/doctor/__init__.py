"""Whether everything that a training needs is there and works: `lm_pcfg doctor`."""
