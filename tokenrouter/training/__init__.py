"""Labels, data sets and training of learned routers."""
