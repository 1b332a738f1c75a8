package health

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"os"
	"strings"
	"sync/atomic"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

const (
	// bodyMax is the number of bytes of an answer that are searched for health.http.body.
	bodyMax = 64 << 10
	// headerMax is far more than a health page needs, and small enough for 5,000 of them at once.
	headerMax = 16 << 10
	userAgent = "shunt-health"
)

// httpProber asks for a page, over a connection of its own.
type httpProber struct {
	reach
	client *http.Client
	url    string
}

func newHTTPProber(t reach) prober {
	transport := &http.Transport{
		DialContext:            handOver,
		DisableKeepAlives:      true,
		DisableCompression:     true,
		MaxResponseHeaderBytes: headerMax,
	}
	if t.health.Check == model.CheckHTTPS {
		config, err := tlsConfig(t.target)
		if err != nil {
			return broken{err}
		}
		transport.TLSClientConfig = config
	}
	return &httpProber{reach: t, url: string(t.health.Check) + "://" + t.at.String() + t.health.HTTP.Path,
		client: &http.Client{Transport: transport,
			// A redirect is an answer; the expected statuses decide whether it is a success.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}}
}

// tlsConfig returns the authorities and names by which a certificate is judged.
func tlsConfig(t target) (*tls.Config, error) {
	config := &tls.Config{ServerName: t.health.TLS.ServerName, InsecureSkipVerify: t.health.TLS.NoVerify}
	if config.ServerName == "" {
		config.ServerName = t.at.Addr().String() // not sent: SNI has names only (RFC 6066, 3)
		if host := t.health.HTTP.Host; host != "" {
			config.ServerName = host
			if name, _, err := net.SplitHostPort(host); err == nil {
				config.ServerName = name
			}
		}
	}
	if file := t.health.TLS.CAFile; file != "" && !config.InsecureSkipVerify {
		var err error
		if config.RootCAs, err = Authorities(file); err != nil {
			return nil, err
		}
	}
	return config, nil
}

// Authorities reads the certificate authorities in a ca_file, in PEM (RFC 7468).
func Authorities(file string) (*x509.CertPool, error) {
	pem, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read health.https.ca_file: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("read health.https.ca_file: %s has no PEM certificate", file)
	}
	return pool, nil
}

// stages of a request over a connection, for the cause of a failure.
var stages = []string{"tls handshake", "http answer"}

func (p *httpProber) probe(ctx context.Context) error {
	ctx, conn, err := p.connected(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()     //nolint:errcheck // nothing is lost
	var stage atomic.Int32 // the transport reports from goroutines of its own
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GotConn: func(httptrace.GotConnInfo) { stage.Store(1) },
	})
	if p.health.Check == model.CheckHTTP {
		stage.Store(1)
	}
	fail := func(err error) error { return cause(stages[stage.Load()], err, p.health.Timeout) }
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, p.url, nil)
	if err != nil {
		return fmt.Errorf("http request: %w", err)
	}
	request.Host = p.health.HTTP.Host
	request.Header.Set("User-Agent", userAgent)
	response, err := p.client.Do(request)
	if err != nil {
		var whole *url.Error
		if errors.As(err, &whole) {
			err = whole.Err // the URL is in the line anyway
		}
		return fail(certificate(err))
	}
	defer response.Body.Close() //nolint:errcheck // nothing is lost
	if !expected(p.health.HTTP.Statuses, response.StatusCode) {
		return fmt.Errorf("http status %s, want %s", response.Status, statusText(p.health.HTTP.Statuses))
	}
	if p.health.HTTP.Body == "" {
		return nil
	}
	body, err := io.ReadAll(io.LimitReader(response.Body, bodyMax))
	if err != nil {
		return cause("http body", err, p.health.Timeout)
	}
	if !bytes.Contains(body, []byte(p.health.HTTP.Body)) {
		return fmt.Errorf("http body: %s does not have %s in it", excerpt(body), excerpt([]byte(p.health.HTTP.Body)))
	}
	return nil
}

// certificate adds the remedy to the error of a certificate that is not trusted.
func certificate(err error) error {
	var unverified *tls.CertificateVerificationError
	if !errors.As(err, &unverified) {
		return err
	}
	return fmt.Errorf("%w; set ca_file to its authority, or server_name to its name, or verify: false", unverified.Err)
}

func expected(statuses []model.StatusRange, status int) bool {
	for _, s := range statuses {
		if int(s.First) <= status && status <= int(s.Last) {
			return true
		}
	}
	return false
}

// statusText is "200-399 or 404".
func statusText(statuses []model.StatusRange) string {
	texts := make([]string, len(statuses))
	for i, s := range statuses {
		texts[i] = s.String()
	}
	return strings.Join(texts, " or ")
}
