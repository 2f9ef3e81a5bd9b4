"""How good a score of samples or mixes is: one protocol to a file, run by evaluate_scores.py."""
