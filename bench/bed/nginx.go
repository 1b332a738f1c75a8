package bed

import "fmt"

// Nginx is a server of the benchmarks: it answers every request with the same few bytes, or has another server answer, and
// keeps connections.
type Nginx struct {
	Workers  int
	Listen   string // as nginx's listen: a port, and options
	Answer   string // the body, without its newline
	Upstream string // who answers, as in "127.0.0.1:8080"; empty: it does
	PID      string // file
	ErrorLog string // file
	Folder   string // exists; for files that the answer never needs
}

// Config is the text of its configuration file.
func (n Nginx) Config() string {
	location, upstream := fmt.Sprintf(`default_type text/plain; return 200 "%s\n";`, n.Answer), ""
	if n.Upstream != "" {
		location = `proxy_pass http://upstream; proxy_http_version 1.1; proxy_set_header Connection "";`
		upstream = fmt.Sprintf("upstream upstream { server %s; keepalive 1000; keepalive_requests 1000000000; keepalive_timeout 600s; }\n    ", n.Upstream)
	}
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
    %[7]sserver {
        listen %[5]s backlog=4096;
        location / { %[6]s }
    }
}
`, n.Workers, n.PID, n.ErrorLog, n.Folder, n.Listen, location, upstream)
}
