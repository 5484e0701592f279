"""What is measured at the start: the seconds of rounds, and the best number of threads."""
