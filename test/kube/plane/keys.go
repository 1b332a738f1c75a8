package plane

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// authority is a certificate authority for one run.
type authority struct {
	folder      string
	server      string // the apiserver's address, for kubeconfigs
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	serial      int64
}

// writeKeys writes the files of the components and their clients: ca.crt, apiserver.crt and .key,
// accounts.key, the kubeconfig, and the nodes' files. The result is for a client with all rights.
func (o Options) writeKeys(server string) (*tls.Config, error) {
	ca := &authority{folder: o.Folder, server: server}
	if err := ca.found(); err != nil {
		return nil, fmt.Errorf("make a certificate authority: %w", err)
	}
	addresses, err := o.names()
	if err != nil {
		return nil, err
	}
	if _, _, err := ca.issue("apiserver", &x509.Certificate{
		Subject: pkix.Name{CommonName: "kube-apiserver"}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames: []string{"localhost", "kubernetes", "kubernetes.default.svc"}, IPAddresses: addresses,
	}); err != nil {
		return nil, fmt.Errorf("issue the apiserver's certificate: %w", err)
	}
	certificate, key, err := ca.client("admin", &x509.Certificate{Subject: pkix.Name{CommonName: "admin", Organization: []string{"system:masters"}}})
	if err != nil {
		return nil, fmt.Errorf("issue the administrator's certificate: %w", err)
	}
	for _, node := range o.Nodes {
		of := &x509.Certificate{Subject: pkix.Name{CommonName: "system:node:" + node.Name, Organization: []string{"system:nodes"}},
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, DNSNames: []string{node.Name}}
		for _, a := range node.Addresses {
			of.IPAddresses = append(of.IPAddresses, a.AsSlice())
		}
		if _, _, err := ca.client(node.Name, of); err != nil {
			return nil, fmt.Errorf("issue the certificate of node %s: %w", node.Name, err)
		}
	}
	accounts, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	if _, err := writeKey(o.in("accounts.key"), accounts); err != nil {
		return nil, err
	}
	own, err := tls.X509KeyPair(certificate, key)
	if err != nil {
		return nil, err
	}
	return trusting(ca.certificate, own), nil
}

// names are the addresses of the apiserver: its own, and the first of each range of cluster IPs, which
// the Service "kubernetes" has.
func (o Options) names() ([]net.IP, error) {
	all := []net.IP{net.IPv4(127, 0, 0, 1)}
	if o.Address.IsValid() {
		all = append(all, o.Address.AsSlice())
	}
	for text := range strings.SplitSeq(o.ServiceRange, ",") {
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, fmt.Errorf("read the range of cluster IPs %q: %w", o.ServiceRange, err)
		}
		all = append(all, prefix.Masked().Addr().Next().AsSlice())
	}
	return all, nil
}

// client issues a client's certificate and writes NAME.kubeconfig, beside the files of issue.
func (a *authority) client(name string, of *x509.Certificate) (certificate, key []byte, err error) {
	of.ExtKeyUsage = append(of.ExtKeyUsage, x509.ExtKeyUsageClientAuth)
	if certificate, key, err = a.issue(name, of); err != nil {
		return nil, nil, err
	}
	encoded := base64.StdEncoding.EncodeToString
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: test, cluster: {server: %q, certificate-authority-data: %s}}]
users: [{name: %s, user: {client-certificate-data: %s, client-key-data: %s}}]
contexts: [{name: test, context: {cluster: test, user: %s}}]
current-context: test
`, a.server, encoded(asPEM("CERTIFICATE", a.certificate.Raw)), name, encoded(certificate), encoded(key), name)
	return certificate, key, os.WriteFile(filepath.Join(a.folder, name+".kubeconfig"), []byte(text), 0o600)
}

// found makes the authority's own key and certificate.
func (a *authority) found() (err error) {
	if a.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		return err
	}
	template := a.template(&x509.Certificate{Subject: pkix.Name{CommonName: "test-ca"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature})
	raw, err := x509.CreateCertificate(rand.Reader, template, template, a.key.Public(), a.key)
	if err != nil {
		return err
	}
	if a.certificate, err = x509.ParseCertificate(raw); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(a.folder, "ca.crt"), asPEM("CERTIFICATE", raw), 0o600)
}

// template adds the common fields of all certificates.
func (a *authority) template(of *x509.Certificate) *x509.Certificate {
	a.serial++
	of.SerialNumber = big.NewInt(a.serial)
	of.NotBefore, of.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(24*time.Hour)
	of.KeyUsage |= x509.KeyUsageDigitalSignature
	return of
}

// issue writes NAME.crt and NAME.key, and returns both as PEM.
func (a *authority) issue(name string, of *x509.Certificate) (certificate, key []byte, err error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	raw, err := x509.CreateCertificate(rand.Reader, a.template(of), a.certificate, private.Public(), a.key)
	if err != nil {
		return nil, nil, err
	}
	if key, err = writeKey(filepath.Join(a.folder, name+".key"), private); err != nil {
		return nil, nil, err
	}
	certificate = asPEM("CERTIFICATE", raw)
	return certificate, key, os.WriteFile(filepath.Join(a.folder, name+".crt"), certificate, 0o600)
}

func writeKey(path string, key *ecdsa.PrivateKey) ([]byte, error) {
	raw, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	text := asPEM("EC PRIVATE KEY", raw)
	return text, os.WriteFile(path, text, 0o600)
}

func asPEM(kind string, raw []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: raw})
}
