"""What a deployment will cost before a GPU is touched: copies, bytes, time and memory. Imports neither torch nor numpy."""
