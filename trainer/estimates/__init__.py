"""Memory and time that a recipe needs, worked out from sizes and data sheets."""
