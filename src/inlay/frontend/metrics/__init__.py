"""What is counted, in Prometheus' form; asking costs nothing and reaches no worker."""
