"""Plans of many cells, on one machine and on a cluster."""
