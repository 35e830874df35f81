"""Programs for a Python without Hotbunk, which has the packages of an agent instead; they import nothing of ours."""
