"""The commands of `hotbunk` beside `train`."""
