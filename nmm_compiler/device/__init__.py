"""What needs a Trainium device or vLLM on one: the ladder of constructs, calibration, serving."""
