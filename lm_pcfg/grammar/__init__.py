"""Parameter networks -> a `Grammar` of probability tensors -> log-likelihood. Knows nothing of files or training."""
