"""nnScaler's trainer: a program that is one file of arguments."""
