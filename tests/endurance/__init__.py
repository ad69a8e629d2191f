"""Long runs: what shows only after many repetitions."""
