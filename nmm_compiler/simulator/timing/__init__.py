"""The timing model: a trace and a target in, a timeline and a profile out."""
