"""Private names of transformers, by what nxdpp does with them. A use follows the word nxdpp in a message."""
