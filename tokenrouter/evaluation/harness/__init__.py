"""lm-evaluation-harness on the engine. ``model`` imports it, the others when tasks are asked for."""
