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
	"os"
	"path/filepath"
	"time"
)

// authority is a certificate authority for one run.
type authority struct {
	folder      string
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	serial      int64
}

// writeKeys writes what the components and their clients need: ca.crt, apiserver.crt and .key,
// accounts.key and the kubeconfig. The result is for a client that may do everything.
func writeKeys(folder, server string) (*tls.Config, error) {
	ca := &authority{folder: folder}
	if err := ca.found(); err != nil {
		return nil, fmt.Errorf("make a certificate authority: %w", err)
	}
	if _, _, err := ca.issue("apiserver", &x509.Certificate{
		Subject: pkix.Name{CommonName: "kube-apiserver"}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames: []string{"localhost", "kubernetes"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}); err != nil {
		return nil, fmt.Errorf("issue the apiserver's certificate: %w", err)
	}
	certificate, key, err := ca.issue("admin", &x509.Certificate{
		Subject: pkix.Name{CommonName: "admin", Organization: []string{"system:masters"}}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
	if err != nil {
		return nil, fmt.Errorf("issue the administrator's certificate: %w", err)
	}
	accounts, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	if _, err := writeKey(filepath.Join(folder, "accounts.key"), accounts); err != nil {
		return nil, err
	}
	own, err := tls.X509KeyPair(certificate, key)
	if err != nil {
		return nil, err
	}
	encoded := base64.StdEncoding.EncodeToString
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: test, cluster: {server: %q, certificate-authority-data: %s}}]
users: [{name: admin, user: {client-certificate-data: %s, client-key-data: %s}}]
contexts: [{name: test, context: {cluster: test, user: admin}}]
current-context: test
`, server, encoded(asPEM("CERTIFICATE", ca.certificate.Raw)), encoded(certificate), encoded(key))
	return trusting(ca.certificate, own), os.WriteFile(filepath.Join(folder, Kubeconfig), []byte(text), 0o600)
}

// found makes the authority itself.
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

// template adds what all certificates have.
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
