"""The commands of `hotbunk`, and the start of the ranks of `train` and `sft`."""
