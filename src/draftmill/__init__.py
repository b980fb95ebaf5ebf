"""draftmill: from conversations to a measured EAGLE-3 draft model."""
