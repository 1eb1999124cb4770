"""The drafter that copies: what followed a text's last tokens where they stood before."""
