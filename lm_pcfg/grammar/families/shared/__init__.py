"""What families share: the interface, the settings; what PCFGs, compound PCFGs and HMMs have in common."""
