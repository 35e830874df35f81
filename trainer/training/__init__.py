"""Training as a library: the calls of which a loop of one's own is made (`hotbunk.Training`)."""
