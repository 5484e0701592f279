"""A trace collector that discards all it gets. It prints its port, and serves until it is ended."""

from http.server import BaseHTTPRequestHandler, HTTPServer


class Sink(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Silent: the name and signature are http.server's."""


if __name__ == "__main__":
    with HTTPServer(("127.0.0.1", 0), Sink) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()
