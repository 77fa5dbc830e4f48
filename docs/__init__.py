"""The pages, and the three small programs behind them: `include` (code and tables), `numbers`, `hooks` (the site)."""
