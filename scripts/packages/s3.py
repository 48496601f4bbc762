#!/usr/bin/env python3
"""s3.py CERTIFICATE KEY: a server that speaks as S3 does, with TLS, on a port of its own of 127.0.0.1, which it prints. It has
one bucket, `bucket`, in memory."""

import http.server
import ssl
import sys
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

objects = {}


def page(prefix, delimiter, token, most):
    """What `prefix` begins, behind `token`."""
    names = set()
    for key in list(objects):
        if key.startswith(prefix):
            folder, slash, _ = key[len(prefix):].partition("/")
            names.add(prefix + folder + slash if delimiter and slash else key)
    names = sorted(name for name in names if name > token)
    more, names = len(names) > most, names[:most]
    text = f"<IsTruncated>{str(more).lower()}</IsTruncated>"
    if more:
        text += f"<NextContinuationToken>{escape(names[-1])}</NextContinuationToken>"
    for name in names:
        if name in objects:
            text += f"<Contents><Key>{escape(name)}</Key><Size>{len(objects[name])}</Size></Contents>"
        else:
            text += f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
    return f"<ListBucketResult>{text}</ListBucketResult>".encode()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status, body=b""):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def any(self):
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        key = unquote(url.path).removeprefix("/bucket").removeprefix("/")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if not self.headers.get("Authorization", "").startswith("AWS4-HMAC-SHA256 Credential=key/"):
            self.answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        elif self.command == "PUT":
            objects[key] = body
            self.answer(200)
        elif self.command == "DELETE":
            objects.pop(key, None)
            self.answer(204)
        elif not key:
            asked = (query.get(name, "") for name in ("prefix", "delimiter", "continuation-token"))
            self.answer(200, page(*asked, int(query.get("max-keys", 1000))))
        elif key not in objects:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        elif "Range" in self.headers:
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            found = objects[key][int(first):int(last) + 1]
            self.answer(206 if found else 416, found or b"<Error><Code>InvalidRange</Code></Error>")
        else:
            self.answer(200, objects[key])

    do_GET = do_HEAD = do_PUT = do_DELETE = any

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    def finish_request(self, request, client_address):
        # In the connection's own thread: a client that refuses the certificate keeps nobody waiting.
        try:
            super().finish_request(tls.wrap_socket(request, server_side=True), client_address)
        except OSError:
            pass


tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
tls.load_cert_chain(*sys.argv[1:])
server = Server(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
