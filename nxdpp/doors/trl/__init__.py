"""TRL's trainers over a pipeline; ``nxdpp.integrations`` lists the names that users import."""
