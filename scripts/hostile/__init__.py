"""What the scripts of hostile and of long load share: the server that they drive, and clients."""
