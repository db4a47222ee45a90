"""Quality, throughput and the trade-off between them, with tables and plots."""
