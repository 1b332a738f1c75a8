package bed

import "fmt"

// Nginx is a server of the benchmarks: it answers every request with the same few bytes, and keeps connections.
type Nginx struct {
	Workers  int
	Listen   string // as nginx's listen: a port, and options
	Answer   string // the body, without its newline
	PID      string // file
	ErrorLog string // file
	Folder   string // exists; for files that the answer never needs
}

// Config is the text of its configuration file.
func (n Nginx) Config() string {
	return fmt.Sprintf(`daemon off;
user root;
worker_processes %[1]d;
pid %[2]s;
error_log %[3]s;
events { worker_connections 20000; }
http {
    access_log off;
    client_body_temp_path %[4]s/body;
    proxy_temp_path %[4]s/proxy;
    fastcgi_temp_path %[4]s/fastcgi;
    uwsgi_temp_path %[4]s/uwsgi;
    scgi_temp_path %[4]s/scgi;
    keepalive_requests 1000000000;
    keepalive_timeout 600s;
    server {
        listen %[5]s backlog=4096;
        location / { default_type text/plain; return 200 "%[6]s\n"; }
    }
}
`, n.Workers, n.PID, n.ErrorLog, n.Folder, n.Listen, n.Answer)
}
