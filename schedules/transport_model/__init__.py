"""Model of the transport: do all ranks come to their end, for a backend and a use of the device?"""
