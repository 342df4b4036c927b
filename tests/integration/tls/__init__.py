"""TLS over real sockets, with throwaway CAs."""
