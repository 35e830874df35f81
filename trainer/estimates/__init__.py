"""How much memory and time a recipe takes, worked out from sizes and data sheets."""
