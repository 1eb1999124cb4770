"""Where keys, values and recurrent state live: pages of lanes and the tensors behind them."""
