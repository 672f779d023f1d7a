"""Linear layers of one x: the record, the specs that construct it, the schedule, the NKI kernel."""
